package com.nvidia.spark;

import ai.rapids.cudf.ColumnVector;

/**
 * The declaration of the RAPIDS plugin's interface of the same name: what headrace's functions are compiled against, and what a
 * JVM without the plugin (1 GB) loads so that it can load them. With the plugin its own interface is loaded: it is on the
 * application's class path, which comes before `spark.jars`.
 */
public interface RapidsUDF {
  /** The function over a batch of columns on the GPU. */
  ColumnVector evaluateColumnar(int numRows, ColumnVector... args);
}

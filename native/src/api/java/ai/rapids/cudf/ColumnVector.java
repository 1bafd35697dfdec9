package ai.rapids.cudf;

/** The name of cuDF's class, for signatures alone: see {@link com.nvidia.spark.RapidsUDF}. */
public final class ColumnVector {
  private ColumnVector() {}
}

package headrace.udf;

import ai.rapids.cudf.ColumnVector;
import com.nvidia.spark.RapidsUDF;
import org.apache.spark.sql.api.java.UDF4;

/**
 * headrace_ngrams(text binary, n int, most int, buckets int) -> array&lt;int&gt;: hashed n-grams of UTF-8 text; null for null.
 *
 * <p>Text comes as binary: a String would have been decoded by Java already, whose answer to ill-formed bytes is another one.
 */
public class TextNgrams implements UDF4<byte[], Integer, Integer, Integer, int[]>, RapidsUDF {
  private static final long serialVersionUID = 1L;

  @Override
  public int[] call(byte[] text, Integer n, Integer most, Integer buckets) {
    return text == null ? null : OneRow.ofThread().ngrams(text, n, most, buckets);
  }

  @Override
  public ColumnVector evaluateColumnar(int numRows, ColumnVector... args) {
    return Columnar.get().ngrams(numRows, args);
  }
}

package headrace.udf;

import ai.rapids.cudf.ColumnVector;
import com.nvidia.spark.RapidsUDF;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.api.java.UDF3;
import scala.collection.Iterator;
import scala.collection.Seq;

/**
 * headrace_cross(columns struct, most int, buckets int) -> array&lt;int&gt;: a code for each combination of one value of each column.
 * The struct's fields are bigint or array&lt;bigint&gt;; null where one of them is null.
 */
public class FeatureCross implements UDF3<Row, Integer, Integer, int[]>, RapidsUDF {
  private static final long serialVersionUID = 1L;

  @Override
  public int[] call(Row columns, Integer most, Integer buckets) {
    if (columns == null) {
      return null;
    }
    int[] ends = new int[columns.size()];
    long[] values = new long[16];
    int size = 0;
    for (int i = 0; i < ends.length; i++) {
      Object column = columns.get(i);
      if (column == null) {
        return null;
      }
      if (column instanceof Seq) {
        for (Iterator<?> each = ((Seq<?>) column).iterator(); each.hasNext(); ) {
          Object value = each.next();
          if (value != null) {
            values = MinHash.append(values, size++, (Long) value);
          }
        }
      } else {
        values = MinHash.append(values, size++, (Long) column);
      }
      ends[i] = size;
    }
    return OneRow.ofThread().cross(java.util.Arrays.copyOf(values, size), ends, most, buckets);
  }

  @Override
  public ColumnVector evaluateColumnar(int numRows, ColumnVector... args) {
    return Columnar.get().cross(numRows, args);
  }
}

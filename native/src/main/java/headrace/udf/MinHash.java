package headrace.udf;

import ai.rapids.cudf.ColumnVector;
import com.nvidia.spark.RapidsUDF;
import java.util.Arrays;
import org.apache.spark.sql.api.java.UDF2;
import scala.collection.Iterator;
import scala.collection.Seq;

/**
 * headrace_minhash(ids array&lt;bigint&gt;, hashes int) -> array&lt;bigint&gt;: the MinHash signature of the ids as a set; null where there is
 * no id.
 */
public class MinHash implements UDF2<Seq<Long>, Integer, long[]>, RapidsUDF {
  private static final long serialVersionUID = 1L;

  @Override
  public long[] call(Seq<Long> ids, Integer hashes) {
    if (ids == null) {
      return null;
    }
    long[] values = new long[16];
    int size = 0;
    for (Iterator<Long> each = ids.iterator(); each.hasNext(); ) {
      // Not typed as Long: a null must not be unboxed.
      Object value = each.next();
      if (value != null) {
        values = append(values, size++, (Long) value);
      }
    }
    return size == 0 ? null : OneRow.ofThread().minhash(values, size, hashes);
  }

  @Override
  public ColumnVector evaluateColumnar(int numRows, ColumnVector... args) {
    return Columnar.get().minhash(numRows, args);
  }

  static long[] append(long[] values, int size, long value) {
    long[] room = size < values.length ? values : Arrays.copyOf(values, 2 * size);
    room[size] = value;
    return room;
  }
}

package headrace.udf;

import ai.rapids.cudf.ColumnVector;

/** The functions over cuDF's columns. Its one implementation is compiled where the plugin's jar is at hand. */
public interface Columnar {
  ColumnVector ngrams(int rows, ColumnVector[] args);

  ColumnVector cross(int rows, ColumnVector[] args);

  ColumnVector minhash(int rows, ColumnVector[] args);

  /** The implementation, loaded when it is first asked for. */
  static Columnar get() {
    return Holder.INSTANCE;
  }

  /** See {@link #get}. */
  final class Holder {
    static final Columnar INSTANCE = find();

    private Holder() {}

    private static Columnar find() {
      try {
        return (Columnar) Class.forName("headrace.udf.CudfColumnar").getDeclaredConstructor().newInstance();
      } catch (ReflectiveOperationException e) {
        throw new IllegalStateException(
            "headrace's UDF jar was built without the RAPIDS plugin: `make rapids native-cuda`, see docs/native.md", e);
      }
    }
  }
}

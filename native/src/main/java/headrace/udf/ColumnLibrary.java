package headrace.udf;

import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;

/** headrace_columns.h for Java. All longs but numbers of rows are addresses; 0 is NULL. */
public abstract class ColumnLibrary {
  static final int VERSION = 1;
  /** Bytes of a headrace_column. */
  public static final int COLUMN_BYTES = 56;
  public static final int MOST_COLUMNS = 8;

  public abstract int version();

  public abstract String reason();

  abstract long address(ByteBuffer buffer);

  public abstract long workspace(long rows);

  public abstract int ngramsOffsets(
      long text, long rows, int n, int most, long out, long validity, long workspace, long stream);

  public abstract int ngrams(
      long text, long rows, int n, int most, int buckets, long offsets, long out, long stream);

  public abstract int crossOffsets(
      long columns, int count, long rows, int most, long out, long validity, long workspace, long stream);

  public abstract int cross(
      long columns, int count, long rows, int most, int buckets, long offsets, long out, long stream);

  public abstract int minhash(long ids, long rows, int hashes, long out, long validity, long stream);

  /** Throws what an error code says. */
  public final void check(int code) {
    switch (code) {
      case 0:
        return;
      case 1:
        throw new IllegalArgumentException("a parameter of the function is outside its range, see docs/native.md");
      case 2:
        throw new IllegalArgumentException(
            "rows x results of one batch do not fit 32-bit offsets: lower the function's limit, or spark.rapids.sql.batchSizeBytes");
      default:
        throw new IllegalStateException("the CUDA runtime says: " + reason());
    }
  }

  /** The library over host memory, loaded when it is first asked for. */
  static ColumnLibrary host() {
    return Host.LIBRARY;
  }

  /** The library over device memory, loaded when it is first asked for. */
  public static ColumnLibrary cuda() {
    return Cuda.LIBRARY;
  }

  private static final class Host {
    static final ColumnLibrary LIBRARY = load("libheadrace_columns.so", new HostColumns());
  }

  private static final class Cuda {
    static final ColumnLibrary LIBRARY = load("libheadrace_columns_cuda.so", new CudaColumns());
  }

  /** Loads the library that came in this jar. */
  private static ColumnLibrary load(String file, ColumnLibrary library) {
    String platform = System.getProperty("os.name").toLowerCase() + "-" + System.getProperty("os.arch");
    String name = "/native/" + platform + "/" + file;
    try (InputStream in = ColumnLibrary.class.getResourceAsStream(name)) {
      if (in == null) {
        throw new IllegalStateException(name + " is not in headrace's UDF jar: build it on this platform, see docs/native.md");
      }
      Path copy = Files.createTempFile("headrace-", "-" + file);
      try {
        Files.copy(in, copy, StandardCopyOption.REPLACE_EXISTING);
        System.load(copy.toString());
      } finally {
        // The mapping stays; no file is left behind even if the JVM is killed.
        Files.deleteIfExists(copy);
      }
    } catch (IOException e) {
      throw new UncheckedIOException(e);
    }
    if (library.version() != VERSION) {
      throw new IllegalStateException(file + " has version " + library.version() + ", not " + VERSION);
    }
    return library;
  }
}

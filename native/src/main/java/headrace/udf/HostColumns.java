package headrace.udf;

import java.nio.ByteBuffer;

/** The library over host memory. */
final class HostColumns extends ColumnLibrary {
  @Override
  public native int version();

  @Override
  public native String reason();

  @Override
  native long address(ByteBuffer buffer);

  @Override
  public native long workspace(long rows);

  @Override
  public native int ngramsOffsets(
      long text, long rows, int n, int most, long out, long validity, long workspace, long stream);

  @Override
  public native int ngrams(long text, long rows, int n, int most, int buckets, long offsets, long out, long stream);

  @Override
  public native int crossOffsets(
      long columns, int count, long rows, int most, long out, long validity, long workspace, long stream);

  @Override
  public native int cross(
      long columns, int count, long rows, int most, int buckets, long offsets, long out, long stream);

  @Override
  public native int minhash(long ids, long rows, int hashes, long out, long validity, long stream);
}

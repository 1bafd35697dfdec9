package headrace.udf;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/**
 * Calls the library over host memory with a column of one row: Spark hands rows to a UDF one at a time. The memory outside
 * the heap is a thread's own and is used again by its next row.
 */
final class OneRow {
  private static final ThreadLocal<OneRow> THREAD_LOCAL = ThreadLocal.withInitial(OneRow::new);

  private final ColumnLibrary library = ColumnLibrary.host();
  private final Memory columns = new Memory(library);
  private final Memory offsets = new Memory(library);
  private final Memory values = new Memory(library);
  private final Memory resultOffsets = new Memory(library);
  private final Memory out = new Memory(library);

  static OneRow ofThread() {
    return THREAD_LOCAL.get();
  }

  int[] ngrams(byte[] text, int n, int most, int buckets) {
    values.room(text.length).put(text);
    offsets.room(8).putInt(0).putInt(text.length);
    column(columns.room(ColumnLibrary.COLUMN_BYTES), offsets.address(), values.address(), text.length);
    resultOffsets.room(8);
    library.check(
        library.ngramsOffsets(columns.address(), 1, n, most, resultOffsets.address(), 0, 0, 0));
    int[] codes = new int[resultOffsets.buffer().getInt(4)];
    out.room(4L * codes.length);
    library.check(
        library.ngrams(columns.address(), 1, n, most, buckets, resultOffsets.address(), out.address(), 0));
    out.buffer().asIntBuffer().get(codes);
    return codes;
  }

  /** @param ends where the values of each column end in `all`: those that are there, of the columns one after the other */
  int[] cross(long[] all, int[] ends, int most, int buckets) {
    int count = ends.length;
    values.room(8L * all.length).asLongBuffer().put(all);
    offsets.room(8L * count);
    ByteBuffer described = columns.room((long) ColumnLibrary.COLUMN_BYTES * count);
    int begin = 0;
    for (int i = 0; i < count; i++) {
      offsets.buffer().putInt(begin).putInt(ends[i]);
      column(described, offsets.address() + 8L * i, values.address(), all.length);
      begin = ends[i];
    }
    resultOffsets.room(8);
    library.check(library.crossOffsets(columns.address(), count, 1, most, resultOffsets.address(), 0, 0, 0));
    int[] codes = new int[resultOffsets.buffer().getInt(4)];
    out.room(4L * codes.length);
    library.check(
        library.cross(columns.address(), count, 1, most, buckets, resultOffsets.address(), out.address(), 0));
    out.buffer().asIntBuffer().get(codes);
    return codes;
  }

  /** @param ids at least one */
  long[] minhash(long[] ids, int count, int hashes) {
    values.room(8L * count).asLongBuffer().put(ids, 0, count);
    offsets.room(8).putInt(0).putInt(count);
    column(columns.room(ColumnLibrary.COLUMN_BYTES), offsets.address(), values.address(), count);
    out.room(8L * Math.max(hashes, 0));
    library.check(library.minhash(columns.address(), 1, hashes, out.address(), 0, 0));
    long[] signature = new long[hashes];
    out.buffer().asLongBuffer().get(signature);
    return signature;
  }

  /** A headrace_column whose rows and values are all there. */
  private static void column(ByteBuffer to, long offsets, long values, long length) {
    to.putLong(offsets).putLong(values).putLong(length).putLong(0).putLong(0).putLong(0).putLong(0);
  }

  /** Memory that grows. */
  private static final class Memory {
    private static final long LARGEST = Integer.MAX_VALUE - 8;
    private final ColumnLibrary library;
    private ByteBuffer buffer;
    private long address;

    Memory(ColumnLibrary library) {
      this.library = library;
      take(64);
    }

    private void take(int bytes) {
      buffer = ByteBuffer.allocateDirect(bytes).order(ByteOrder.nativeOrder());
      address = library.address(buffer);
    }

    /** At least so many bytes; what was there is lost. */
    ByteBuffer room(long bytes) {
      if (bytes > LARGEST) {
        throw new IllegalArgumentException("a row of " + bytes + " bytes is larger than 2 GiB");
      }
      if (buffer.capacity() < bytes) {
        take((int) Math.min(LARGEST, Math.max(bytes, 2L * buffer.capacity())));
      }
      buffer.clear();
      return buffer;
    }

    ByteBuffer buffer() {
      return buffer;
    }

    long address() {
      return address;
    }
  }
}

package headrace.udf;

import ai.rapids.cudf.BaseDeviceMemoryBuffer;
import ai.rapids.cudf.BinaryOp;
import ai.rapids.cudf.ColumnVector;
import ai.rapids.cudf.ColumnView;
import ai.rapids.cudf.Cuda;
import ai.rapids.cudf.DType;
import ai.rapids.cudf.DeviceMemoryBuffer;
import ai.rapids.cudf.HostMemoryBuffer;
import ai.rapids.cudf.Scalar;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;

/**
 * The functions over cuDF's columns. Addresses of device memory go to the CUDA library; every buffer is cuDF's own, so the
 * plugin's memory pool and its spilling know of it. Columns that come in are the caller's, the one that goes out, too.
 */
public final class CudfColumnar implements Columnar {
  /** cudaStreamPerThread and cudaStreamLegacy: the stream that cuDF works on. */
  private static final long STREAM = Cuda.isPtdsEnabled() ? 2 : 1;

  private final ColumnLibrary library = ColumnLibrary.cuda();

  @Override
  public ColumnVector ngrams(int rows, ColumnVector[] args) {
    if (rows == 0) {
      return list(0, null, 0, DType.INT32, null, null);
    }
    int n = parameter(args[1]);
    int most = parameter(args[2]);
    int buckets = parameter(args[3]);
    try (Described text = new Described(library, 1)) {
      text.add(args[0]);
      return lists(
          rows,
          text.nullable,
          (out, validity, workspace) ->
              library.ngramsOffsets(text.address(), rows, n, most, out, validity, workspace, STREAM),
          (offsets, out) -> library.ngrams(text.address(), rows, n, most, buckets, offsets, out, STREAM));
    }
  }

  @Override
  public ColumnVector cross(int rows, ColumnVector[] args) {
    if (rows == 0) {
      return list(0, null, 0, DType.INT32, null, null);
    }
    int most = parameter(args[1]);
    int buckets = parameter(args[2]);
    int count = args[0].getNumChildren();
    try (Described columns = new Described(library, count)) {
      for (int i = 0; i < count; i++) {
        columns.add(columns.keep(args[0].getChildColumnView(i)));
      }
      return lists(
          rows,
          columns.nullable,
          (out, validity, workspace) ->
              library.crossOffsets(columns.address(), count, rows, most, out, validity, workspace, STREAM),
          (offsets, out) -> library.cross(columns.address(), count, rows, most, buckets, offsets, out, STREAM));
    }
  }

  @Override
  public ColumnVector minhash(int rows, ColumnVector[] args) {
    if (rows == 0) {
      return list(0, null, 0, DType.INT64, null, null);
    }
    int hashes = parameter(args[1]);
    long numbers = (long) rows * hashes;
    try (Described ids = new Described(library, 1);
        Scalar zero = Scalar.fromInt(0);
        Scalar step = Scalar.fromInt(hashes)) {
      ids.add(args[0]);
      try (DeviceMemoryBuffer out = DeviceMemoryBuffer.allocate(Math.max(8, 8 * numbers));
          DeviceMemoryBuffer validity = bits(rows)) {
        library.check(library.minhash(ids.address(), rows, hashes, out.getAddress(), validity.getAddress(), STREAM));
        try (ColumnVector offsets = ColumnVector.sequence(zero, step, rows + 1)) {
          return list(rows, offsets, numbers, DType.INT64, share(out), share(validity));
        }
      }
    }
  }

  private interface Offsets {
    int write(long out, long validity, long workspace);
  }

  private interface Values {
    int write(long offsets, long out);
  }

  /** Lists of codes in two passes: how many, then which. */
  private ColumnVector lists(int rows, boolean nullable, Offsets first, Values second) {
    try (DeviceMemoryBuffer offsets = DeviceMemoryBuffer.allocate(4L * (rows + 1));
        DeviceMemoryBuffer validity = nullable ? bits(rows) : null) {
      try (DeviceMemoryBuffer workspace = DeviceMemoryBuffer.allocate(Math.max(1, library.workspace(rows)))) {
        long bits = validity == null ? 0 : validity.getAddress();
        library.check(first.write(offsets.getAddress(), bits, workspace.getAddress()));
      }
      int total;
      try (DeviceMemoryBuffer last = offsets.slice(4L * rows, 4);
          HostMemoryBuffer hostCopy = HostMemoryBuffer.allocate(4)) {
        hostCopy.copyFromDeviceBuffer(last);
        total = hostCopy.getInt(0);
      }
      try (DeviceMemoryBuffer out = DeviceMemoryBuffer.allocate(Math.max(4, 4L * total))) {
        library.check(second.write(offsets.getAddress(), out.getAddress()));
        try (ColumnVector places =
            new ColumnVector(DType.INT32, rows + 1, Optional.of(0L), share(offsets), null, null)) {
          return list(rows, places, total, DType.INT32, share(out), share(validity));
        }
      }
    }
  }

  /** A list column. Takes `values` and `validity`, not `offsets`. */
  private static ColumnVector list(
      int rows, ColumnVector offsets, long count, DType type, DeviceMemoryBuffer values, DeviceMemoryBuffer validity) {
    if (rows == 0) {
      try (ColumnVector none = type.equals(DType.INT32) ? ColumnVector.fromInts() : ColumnVector.fromLongs();
          ColumnVector zero = ColumnVector.fromInts(0)) {
        return none.makeListFromOffsets(0, zero);
      }
    }
    try (ColumnVector child = new ColumnVector(type, count, Optional.of(0L), values, null, null)) {
      ColumnVector list = child.makeListFromOffsets(rows, offsets);
      if (validity == null) {
        return list;
      }
      // Only its validity is looked at.
      try (ColumnVector unmasked = list;
          ColumnVector mask =
              new ColumnVector(
                  DType.INT8, rows, Optional.empty(), DeviceMemoryBuffer.allocate(rows), validity, null)) {
        return unmasked.mergeAndSetValidity(BinaryOp.BITWISE_AND, mask);
      }
    }
  }

  /** The same buffer for one owner more. */
  private static DeviceMemoryBuffer share(DeviceMemoryBuffer buffer) {
    if (buffer != null) {
      buffer.incRefCount();
    }
    return buffer;
  }

  /** Room for a bit a row, in whole blocks of 64 bytes as cuDF wants it. */
  private static DeviceMemoryBuffer bits(int rows) {
    return DeviceMemoryBuffer.allocate(((rows + 7L) / 8 + 63) / 64 * 64);
  }

  /** A literal, which arrives as a column of as many rows. */
  private static int parameter(ColumnVector column) {
    try (Scalar value = column.getScalarElement(0)) {
      if (!value.isValid()) {
        throw new IllegalArgumentException("a parameter of the function is null");
      }
      return value.getInt();
    }
  }

  /** headrace_column structs of columns, in host memory. */
  private static final class Described implements AutoCloseable {
    private final ByteBuffer memory;
    private final long address;
    private final List<ColumnView> views = new ArrayList<>();
    /** True where a row of a column may be null. */
    boolean nullable = false;

    Described(ColumnLibrary library, int columns) {
      memory = ByteBuffer.allocateDirect(ColumnLibrary.COLUMN_BYTES * columns).order(ByteOrder.nativeOrder());
      address = library.address(memory);
    }

    long address() {
      return address;
    }

    /** A view that is closed with this. */
    ColumnView keep(ColumnView view) {
      views.add(view);
      return view;
    }

    /** Bigints, or a list of bigints or of bytes. */
    void add(ColumnView column) {
      DType type = column.getType();
      nullable |= column.getValid() != null;
      if (type.equals(DType.LIST)) {
        ColumnView child = keep(column.getChildColumnView(0));
        DType elementType = child.getType();
        if (!elementType.equals(DType.INT64) && !elementType.equals(DType.UINT8) && !elementType.equals(DType.INT8)) {
          throw new IllegalArgumentException("takes lists of bigint and binary, not lists of " + elementType);
        }
        put(column.getOffsets(), child.getData(), child.getRowCount(), column.getValid(), child.getValid());
      } else if (type.equals(DType.INT64)) {
        put(null, column.getData(), column.getRowCount(), column.getValid(), null);
      } else {
        throw new IllegalArgumentException("takes bigint, lists of bigint and binary, not " + type);
      }
    }

    private void put(
        BaseDeviceMemoryBuffer offsets,
        BaseDeviceMemoryBuffer values,
        long length,
        BaseDeviceMemoryBuffer validity,
        BaseDeviceMemoryBuffer valueValidity) {
      memory.putLong(addressOf(offsets)).putLong(addressOf(values)).putLong(length);
      memory.putLong(addressOf(validity)).putLong(0).putLong(addressOf(valueValidity)).putLong(0);
    }

    private static long addressOf(BaseDeviceMemoryBuffer buffer) {
      return buffer == null ? 0 : buffer.getAddress();
    }

    @Override
    public void close() {
      views.forEach(ColumnView::close);
    }
  }
}

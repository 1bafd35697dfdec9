package headrace.delta;

import io.delta.storage.S3SingleDriverLogStore;
import java.io.ByteArrayOutputStream;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.util.Arrays;
import java.util.Iterator;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.s3a.Invoker;
import org.apache.hadoop.fs.s3a.S3AFileSystem;
import org.apache.hadoop.fs.s3a.S3ARetryPolicy;
import software.amazon.awssdk.core.sync.RequestBody;
import software.amazon.awssdk.services.s3.S3Client;
import software.amazon.awssdk.services.s3.model.PutObjectRequest;
import software.amazon.awssdk.services.s3.model.S3Exception;

/**
 * Delta's log on S3 for any number of writers: a commit is one PUT on the condition that there is no such version yet.
 * Delta's own store asks whether the file is there and then writes it, so of two drivers at once one loses its commit
 * without a word.
 */
public final class S3ConditionalLogStore extends S3SingleDriverLogStore {
  private static final int PRECONDITION_FAILED = 412;
  private static final int CONFLICT = 409;

  public S3ConditionalLogStore(Configuration hadoop) {
    super(hadoop);
  }

  @Override
  public void write(Path path, Iterator<String> actions, Boolean overwrite, Configuration hadoop) throws IOException {
    if (overwrite) {
      super.write(path, actions, true, hadoop);
      return;
    }
    if (!(path.getFileSystem(hadoop) instanceof S3AFileSystem fs)) {
      throw new IOException(path + " is not read by S3A, whose client makes conditional requests");
    }
    byte[] commit = encoded(actions);
    Path file = fs.makeQualified(path);
    PutObjectRequest request =
        PutObjectRequest.builder()
            .bucket(fs.getBucket())
            .key(file.toUri().getPath().substring(1))
            .overrideConfiguration(options -> options.putHeader("If-None-Match", "*"))
            .build();
    S3Client client = fs.getS3AInternals().getAmazonS3Client("Delta commit");
    // As S3A's own requests: the client gives a busy store up after some ten seconds.
    S3Exception refusal =
        new Invoker(new S3ARetryPolicy(fs.getConf()), Invoker.LOG_EVENT)
            .retry("Delta commit", file.toString(), true, () -> refusal(client, request, commit));
    if (refusal != null && !holds(fs, file, commit)) {
      FileAlreadyExistsException taken = new FileAlreadyExistsException(file.toString());
      taken.initCause(refusal);
      throw taken;
    }
  }

  /** Makes a commit; returns the store's refusal where there is one of that version already, or null. */
  private static S3Exception refusal(S3Client client, PutObjectRequest request, byte[] commit) {
    try {
      client.putObject(request, RequestBody.fromBytes(commit));
      return null;
    } catch (S3Exception e) {
      if (e.statusCode() == PRECONDITION_FAILED || e.statusCode() == CONFLICT) {
        return e;
      }
      throw e;
    }
  }

  /** No part of a commit is visible: Delta then writes it in place. */
  @Override
  public Boolean isPartialWriteVisible(Path path, Configuration hadoop) {
    return false;
  }

  private static byte[] encoded(Iterator<String> lines) throws IOException {
    ByteArrayOutputStream bytes = new ByteArrayOutputStream();
    while (lines.hasNext()) {
      bytes.write(lines.next().getBytes(StandardCharsets.UTF_8));
      bytes.write('\n');
    }
    return bytes.toByteArray();
  }

  /** Returns true where the file is this very commit: the answer to a first try was lost, and the client tried again. */
  private static boolean holds(S3AFileSystem fs, Path file, byte[] commit) throws IOException {
    try (FSDataInputStream in = fs.open(file)) {
      return Arrays.equals(in.readAllBytes(), commit);
    } catch (FileNotFoundException e) {
      return false;
    }
  }
}

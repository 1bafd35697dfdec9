// The C interface for Java: addresses go through as they are. Compiled into both libraries, each for a class of its own
// (HEADRACE_JNI is HostColumns or CudaColumns), since a JVM binds a method to the first library that has its name.
#include <jni.h>

#include "headrace_columns.h"

#define GLUE(class, name) Java_headrace_udf_##class##_##name
#define NAMED(class, name) GLUE(class, name)
#define METHOD(type, name) extern "C" JNIEXPORT type JNICALL NAMED(HEADRACE_JNI, name)

namespace {

template <typename T>
T *at(jlong address) {
  return reinterpret_cast<T *>(address);
}

}  // namespace

METHOD(jint, version)(JNIEnv *, jobject) { return headrace_columns_version(); }

METHOD(jstring, reason)(JNIEnv *env, jobject) { return env->NewStringUTF(headrace_columns_reason()); }

METHOD(jlong, address)(JNIEnv *env, jobject, jobject buffer) {
  return reinterpret_cast<jlong>(env->GetDirectBufferAddress(buffer));
}

METHOD(jlong, workspace)(JNIEnv *, jobject, jlong rows) { return headrace_offsets_workspace(rows); }

METHOD(jint, ngramsOffsets)
(JNIEnv *, jobject, jlong text, jlong rows, jint n, jint most, jlong out, jlong validity, jlong workspace, jlong stream) {
  return headrace_ngrams_offsets(at<headrace_column>(text), rows, n, most, at<int32_t>(out), at<uint8_t>(validity),
                                 at<void>(workspace), at<void>(stream));
}

METHOD(jint, ngrams)
(JNIEnv *, jobject, jlong text, jlong rows, jint n, jint most, jint buckets, jlong offsets, jlong out, jlong stream) {
  return headrace_ngrams(at<headrace_column>(text), rows, n, most, buckets, at<int32_t>(offsets), at<int32_t>(out),
                         at<void>(stream));
}

METHOD(jint, crossOffsets)
(JNIEnv *, jobject, jlong columns, jint count, jlong rows, jint most, jlong out, jlong validity, jlong workspace,
 jlong stream) {
  return headrace_cross_offsets(at<headrace_column>(columns), count, rows, most, at<int32_t>(out), at<uint8_t>(validity),
                                at<void>(workspace), at<void>(stream));
}

METHOD(jint, cross)
(JNIEnv *, jobject, jlong columns, jint count, jlong rows, jint most, jint buckets, jlong offsets, jlong out,
 jlong stream) {
  return headrace_cross(at<headrace_column>(columns), count, rows, most, buckets, at<int32_t>(offsets), at<int32_t>(out),
                        at<void>(stream));
}

METHOD(jint, minhash)
(JNIEnv *, jobject, jlong ids, jlong rows, jint hashes, jlong out, jlong validity, jlong stream) {
  return headrace_minhash(at<headrace_column>(ids), rows, hashes, at<int64_t>(out), at<uint8_t>(validity),
                          at<void>(stream));
}

// The C interface for Java: addresses go through as they are. Compiled into both libraries, each for a class of its own
// (HEADRACE_JNI is HostColumns or CudaColumns), since a JVM binds a method to the first library that has its name.
#include <jni.h>

#include "headrace_columns.h"

#define GLUE(class, name) Java_headrace_udf_##class##_##name
#define NAMED(class, name) GLUE(class, name)
#define METHOD(type, name) extern "C" JNIEXPORT type JNICALL NAMED(HEADRACE_JNI, name)

namespace {

template <typename T>
T *as(jlong address) {
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
  return headrace_ngrams_offsets(as<headrace_column>(text), rows, n, most, as<int32_t>(out), as<uint8_t>(validity),
                                 as<void>(workspace), as<void>(stream));
}

METHOD(jint, ngrams)
(JNIEnv *, jobject, jlong text, jlong rows, jint n, jint most, jint buckets, jlong offsets, jlong out, jlong stream) {
  return headrace_ngrams(as<headrace_column>(text), rows, n, most, buckets, as<int32_t>(offsets), as<int32_t>(out),
                         as<void>(stream));
}

METHOD(jint, crossOffsets)
(JNIEnv *, jobject, jlong columns, jint count, jlong rows, jint most, jlong out, jlong validity, jlong workspace,
 jlong stream) {
  return headrace_cross_offsets(as<headrace_column>(columns), count, rows, most, as<int32_t>(out), as<uint8_t>(validity),
                                as<void>(workspace), as<void>(stream));
}

METHOD(jint, cross)
(JNIEnv *, jobject, jlong columns, jint count, jlong rows, jint most, jint buckets, jlong offsets, jlong out,
 jlong stream) {
  return headrace_cross(as<headrace_column>(columns), count, rows, most, buckets, as<int32_t>(offsets), as<int32_t>(out),
                        as<void>(stream));
}

METHOD(jint, minhash)
(JNIEnv *, jobject, jlong ids, jlong rows, jint hashes, jlong out, jlong validity, jlong stream) {
  return headrace_minhash(as<headrace_column>(ids), rows, hashes, as<int64_t>(out), as<uint8_t>(validity),
                          as<void>(stream));
}

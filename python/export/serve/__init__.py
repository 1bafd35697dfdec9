"""A server of ONNX models on onnxruntime: KServe's inference protocol 2 over HTTP and gRPC (docs/serving.md)."""

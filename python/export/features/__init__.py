"""The fitted workflow outside of headrace: as an ONNX graph, or as a Python step."""

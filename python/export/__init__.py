"""Export of models: ONNX graphs that run without headrace, torch programs, and servers of them."""

"""Models out of the platform: as ONNX graphs that nothing of headrace is needed to ask."""

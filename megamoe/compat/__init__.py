"""Other libraries' doors to the layer: their names, arguments and tensors, our engine behind."""

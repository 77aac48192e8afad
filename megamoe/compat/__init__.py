"""Other libraries' APIs: their names, arguments and tensors over our engine."""

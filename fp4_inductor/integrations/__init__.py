"""F4: how other libraries reach this package. Nothing here is imported until that library is."""

"""F4: other libraries' extension points. Importing this package imports none of them."""

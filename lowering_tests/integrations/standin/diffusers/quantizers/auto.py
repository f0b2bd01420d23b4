AUTO_QUANTIZER_MAPPING = {}
AUTO_QUANTIZATION_CONFIG_MAPPING = {}


def config_from(value):
    if not isinstance(value, dict):
        return value
    method = value.get("quant_method")
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ValueError(f"Unknown quantization type, got {method} - supported types are: {list(AUTO_QUANTIZER_MAPPING)}")
    return AUTO_QUANTIZATION_CONFIG_MAPPING[method].from_dict(value)

from abc import ABC, abstractmethod


class DiffusersQuantizer(ABC):
    def __init__(self, quantization_config, **kwargs):
        self.quantization_config = quantization_config
        self.pre_quantized = kwargs.pop("pre_quantized", True)

    def update_missing_keys(self, model, missing_keys, prefix):
        return missing_keys

    def preprocess_model(self, model, **kwargs):
        model.is_quantized = True
        model.quantization_method = self.quantization_config.quant_method
        return self._process_model_before_weight_loading(model, **kwargs)

    def postprocess_model(self, model, **kwargs):
        return self._process_model_after_weight_loading(model, **kwargs)

    def get_state_dict_and_metadata(self, state_dict, safe_serialization=False):
        return state_dict, {}

    @property
    def supports_safetensors_serialization(self):
        return True

    @abstractmethod
    def _process_model_before_weight_loading(self, model, **kwargs): ...

    @abstractmethod
    def _process_model_after_weight_loading(self, model, **kwargs): ...

    @property
    @abstractmethod
    def is_serializable(self): ...

    @property
    @abstractmethod
    def is_trainable(self): ...

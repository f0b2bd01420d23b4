import copy


class QuantizationConfigMixin:
    @classmethod
    def from_dict(cls, config_dict, return_unused_kwargs=False, **kwargs):
        return cls(**config_dict)

    def to_dict(self):
        return copy.deepcopy(self.__dict__)

    def __repr__(self):
        raise AttributeError("to_diff_dict")

"""F4: prompts and decode steps of Transformers' models. Importing this package does not import transformers.

``cache.py`` has ``KVCache``, ``cache_state.py`` what is saved of it, ``handles.py`` what its layers give to the attention, ``attention.py`` the attention
that reads them, ``regions.py`` the parts of a model that a compiled step takes as wholes, ``layerwise.py`` a prompt through layers that are compiled by
themselves, ``ranks.py`` what of a distributed model is here, ``naming.py`` what Transformers calls a cache.
"""

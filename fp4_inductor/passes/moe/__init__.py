"""Mixture-of-experts layers, however they are written, become ``fp4.moe``.

``index`` and ``read`` follow one element of a tensor back through the graph, ``sums`` (with ``grouped`` and ``scatter``) writes
it as a sum of products, ``layer`` (with ``summand``, ``routing`` and ``activation``) proves that sum to be an MoE layer,
``rewrite`` (with ``layout``) replaces it, ``gather`` saves what can be saved where that fails, and ``find`` runs all of it over
a graph.
"""

from .find import register

__all__ = ["register"]

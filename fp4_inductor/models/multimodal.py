"""Vision and audio towers of multimodal models. To quantize one, call ``quantize_model`` on the tower itself."""

from .family import Family, Skip

FAMILY = Family(
    name="multimodal",
    skips=(
        Skip(
            r"(^|\.)(vision_tower|vision_model|vision_encoder|visual|vision_embed_tokens)\.", "vision tower: small, runs once per image, sensitive", part=True
        ),
        Skip(r"(^|\.)(audio_tower|audio_encoder|audio_model)\.", "audio tower: small, runs once per clip, sensitive", part=True),
    ),
)

"""`import revzoo.timm` adds the image models to timm's registry: `timm.create_model("rev_vit_s", num_classes=10)`."""

from revzoo.model.timm_registry import register_models

register_models()

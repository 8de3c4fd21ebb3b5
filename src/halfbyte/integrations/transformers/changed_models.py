"""Changes methods of transformers' models: resized vocabularies, model cards. Imported with those models (see on_import.py)."""

from halfbyte.integrations.transformers import model_card, vocabulary

__all__ = ["model_card", "vocabulary"]

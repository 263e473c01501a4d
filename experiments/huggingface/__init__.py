"""A trained translation model as a folder that ``transformers`` loads."""

"""Which language a text is in, by the optional library py3langid."""

from headstart.recipes.schema import SELF


class Languages:
    """Tells texts in one language from others; raises ValueError if the library is missing or does not know it."""

    def __init__(self, wanted: str) -> None:
        try:
            from py3langid.langid import MODEL_FILE, LanguageIdentifier
        except ImportError as error:
            raise ValueError(
                f"data.self_language: {wanted} given, which needs py3langid to keep only such prompts of "
                f"data.prompts {SELF}; pip install -e '.[language]', or remove it"
            ) from error
        self.wanted = wanted
        self.identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
        known = sorted(self.identifier.labels)
        if wanted not in known:
            raise ValueError(
                f"data.self_language: {wanted} given, one of {', '.join(known)} is allowed; choose one, or remove it"
            )

    def has(self, text: str) -> bool:
        """Whether the text is most likely in the language."""
        found, _ = self.identifier.classify(text)
        return bool(found == self.wanted)

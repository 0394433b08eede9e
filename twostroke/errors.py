"""Every error this package raises on purpose. The message names the field, the reason and the fix."""


class TwostrokeError(Exception):
    """Base of all errors below: catch this to catch everything twostroke refuses."""


class InputError(TwostrokeError, ValueError):
    """A request cannot be served: a bad prompt, a bad sampling parameter."""


class ModelError(TwostrokeError):
    """A checkpoint cannot be used: missing, damaged, or of a kind we do not know."""


class ConfigError(TwostrokeError, ValueError):
    """A setting of the engine is wrong or does not go together with another one."""


class RankLostError(BaseException):
    """A rank is gone, or stands within a step that another one gave up: the engine ends. A plain exception would end
    the requests of one step only."""

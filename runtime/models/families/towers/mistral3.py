"""Mistral Small 3.1 and 3.2, Devstral, Ministral 3: the text tower is Mistral or Ministral 3."""

from __future__ import annotations

from ...registry import Tower, register

register(Tower("mistral3", ("Mistral3ForConditionalGeneration",), "mistral", any_family=True))

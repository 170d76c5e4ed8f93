"""Docstrings of settings: whose they are, and that a schema has them."""

from pydantic import Field

from compress.common.config import Settings, descriptions


class Base(Settings):
    kept: int = 0
    """What a class
    says of it.
    """
    replaced: int = 0
    """What only the base says."""
    silent: int = 0


class Derived(Base):
    replaced: str = ""
    named: int = Field(0, description="Said in the field.")
    own: int = 0
    """Its own."""
    group: Base = Base()
    """A group."""


def test_each_class_describes_its_own_and_inherits_the_others() -> None:
    class Local(Base):
        local: int = 0
        """In a function."""

    assert descriptions(Base) == {
        "kept": "What a class\nsays of it.",
        "replaced": "What only the base says.",
    }
    own = {"named": "Said in the field.", "own": "Its own.", "group": "A group."}
    assert descriptions(Derived) == {"kept": "What a class\nsays of it."} | own
    assert descriptions(Local) == descriptions(Base) | {"local": "In a function."}


def test_a_schema_has_them_also_of_classes_that_were_used() -> None:
    Derived(own=1)
    properties = Derived.model_json_schema()["properties"]
    said = {name: each.get("description") for name, each in properties.items()}
    assert said == descriptions(Derived) | {"replaced": None, "silent": None}
    assert Base.model_json_schema()["properties"]["kept"]["description"].startswith("What a class")


def test_what_has_no_source_has_no_texts() -> None:
    namespace = {"__name__": "of_a_notebook", "Settings": Settings}
    exec("class Unwritten(Settings):\n    a: int = 0\n    'Not read.'\n", namespace)
    assert descriptions(namespace["Unwritten"]) == {}

"""What is known about data before it is written: attributes, generations, retirement (pure).

No I/O happens here. `attributes` reads what users state, `layouts` what names tell, `markers` and
`completeness` whether a generation is whole, `prediction` turns it into a retirement epoch.
"""

from retainzfs.lifetimes.attributes import (
    ATTRIBUTES,
    NUMBER_MAX,
    PREFIX,
    Access,
    Act,
    Attribute,
    Durability,
    FileClass,
    Policy,
    ScrubOrder,
    Value,
    check_retire,
    is_ours,
    parse,
    parse_durability,
    resolve,
    settable,
)
from retainzfs.lifetimes.completeness import (
    Examination,
    Finding,
    Verdict,
    examination,
)
from retainzfs.lifetimes.layouts import (
    Knows,
    Match,
    number_in,
    recognise,
    series_of,
    usual_series,
    without_temporary,
)
from retainzfs.lifetimes.markers import (
    Layout,
    is_marker,
    is_tracker,
    marker,
    markers_of,
    tracked,
    unfinished_marker,
)
from retainzfs.lifetimes.prediction import NOTHING, Hint, Learned, learned_cadence, retirement
from retainzfs.lifetimes.units import format_size, parse_duration, parse_size

__all__ = [
    "ATTRIBUTES",
    "NOTHING",
    "NUMBER_MAX",
    "PREFIX",
    "Access",
    "Act",
    "Attribute",
    "Durability",
    "Examination",
    "FileClass",
    "Finding",
    "Hint",
    "Knows",
    "Layout",
    "Learned",
    "Match",
    "Policy",
    "ScrubOrder",
    "Value",
    "Verdict",
    "check_retire",
    "examination",
    "format_size",
    "is_marker",
    "is_ours",
    "is_tracker",
    "learned_cadence",
    "marker",
    "markers_of",
    "number_in",
    "parse",
    "parse_durability",
    "parse_duration",
    "parse_size",
    "recognise",
    "resolve",
    "retirement",
    "series_of",
    "settable",
    "tracked",
    "unfinished_marker",
    "usual_series",
    "without_temporary",
]

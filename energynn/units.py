"""Conversions between the SI units of records and the units that tables and texts show."""

JOULE_PER_KWH = 3.6e6
SECOND_PER_HOUR = 3600.0

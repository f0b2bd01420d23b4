"""The only importer of private torch. Imports nothing of ours; everything version-dependent is decided here."""

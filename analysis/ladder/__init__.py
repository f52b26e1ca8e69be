"""The ladder of quality: rungs from a teacher down to predicted routes and up again, and what lies between two."""

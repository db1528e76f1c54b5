"""Other compile caches kept in the same store."""

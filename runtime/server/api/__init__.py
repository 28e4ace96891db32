"""The routes, a file each, with the fields that they take."""

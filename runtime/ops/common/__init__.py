"""What all ops share: checks, dtypes, devices, registration with torch."""

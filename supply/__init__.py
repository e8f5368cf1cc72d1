"""What this project is made of: hashes of everything it installs, and a list of it."""

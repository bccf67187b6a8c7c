"""What scopetrace is measured on: real models (`make zoo`) and time and memory (`make bench`)."""

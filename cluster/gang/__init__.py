"""What the parts of a gang tell each other, and the outcome and progress that follow. Imports ``base`` and
``hardware``, and starts no process."""

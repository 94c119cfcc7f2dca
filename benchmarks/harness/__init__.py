"""What run.py is made of: contenders, suites, statistics, aims, tables and pictures. Python's own library only."""

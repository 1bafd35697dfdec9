"""The environment as an archive for `spark.archives`: `headrace pack`.

archive     which installed packages go along, their files, headrace's own and the programs, as a .tar.gz
python.sh   `bin/python` of the archive: the host's own Python with the archive's packages
"""

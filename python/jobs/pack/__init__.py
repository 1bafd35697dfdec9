"""The environment as an archive for `spark.archives`: `headrace pack`.

distributions   which installed packages go along
contents        their files, headrace's own, and the two programs
archive         all of it as a .tar.gz
python.sh       `bin/python` of the archive: the host's own Python with the archive's packages
"""

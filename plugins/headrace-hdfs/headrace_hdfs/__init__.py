"""HDFS as a store: that of objects (`headrace.storage.objects`), whose calls are made of renames.

    rpc      the calls of HDFS, by hdfs-native's client: no other module makes them, and each has an end
    store    the connection to a NameNode, the calls of a store of objects (`objects.calls.Bucket`) by those of `rpc`,
             and what a store of objects does not have: what writers that were killed left beside a file

So folders are published, leases held and copies kept as in S3, and Spark reads and writes the same paths.

A file is written as `.NAME.TOKEN.partial` beside its name and gets the name by a rename, which the NameNode does whole
or not at all. One that must not replace another one is renamed without leave to overwrite. How a file is replaced on
the condition that it still is the one that was read is told in `store`.
"""

"""A simulated world for stores: one seed decides every order of events, every fault, every instant.

Real code runs in it: `TieredStore`, `Writer`, `Pool`, `DiskStore`, `RemoteStore`, `Breaker`, `Patience`, `Budget`,
`Region`. What it stands on is replaced: threads and locks (`standins`), time, the file system (`disks`, `calls`), the
network and its servers (`network`, `centre`). `nemesis` does the harm, `ledger` knows what must be true, `running`
builds a world and lives through it.
"""

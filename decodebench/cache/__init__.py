"""A layout's bytes on a device, filled by the connector or by one of its historic faults, and read back.

A fill writes every byte once: sorted block ids become runs, and a run is written for all layers of
a group through one strided view. Values are encoded in each part's own dtype and moved as bits.
Everything is checked before the first byte is written. May use: ``models``, ``layout``.
"""

//! The CSI drivers of the node, in the cluster, as a kubelet registers them (`podfs node --register-csi-drivers`): a driver that
//! appears in `<root>/plugins_registry` gets its entry in the CSINode object of the node, and the Node object gets the driver's name
//! for the node and its topology. A driver that goes loses its entries.
//!
//! | module | owns |
//! |---|---|
//! | `registry` | a thread that watches the sockets of the registry |
//! | `objects` | the changes of the two objects; pure functions |
//! | `registrar` | the task that asks drivers and writes the objects |
//!
//! 1. Only this podfs writes the CSINode object of the node; a kubelet, which would also write it, must not run beside it. A change
//!    names the version of the object that it was made from. So if another client has changed the object (409), podfs reads it
//!    again.
//! 2. The entry of a driver in the CSINode comes after its entries in the Node, and goes before them, as the kubelet does. So
//!    the scheduler and controllers, which go by the CSINode, find the topology labels there.
//! 3. podfs answers a registration (`NotifyRegistrationStatus`) when the cluster has both entries, or refuses them. While the
//!    API server is away, podfs waits with the answer.
//! 4. Topology labels stay when the driver goes: PersistentVolumes may be made for them, and another driver may use them.
//! 5. Entries that an earlier podfs wrote stay until their driver has registered again and has then gone. The kubelet does the
//!    same: a driver that is being restarted together with podfs keeps its volumes attached.

mod objects;
mod registrar;
mod registry;

pub(super) use registrar::serve;

//! The server: the process that answers FUSE requests for one pod.
//!
//! The supervisor starts it with one end of a socket pair as its standard input, for the messages of the
//! [`protocol`](crate::protocol). The server gets every device and every payload as a descriptor. It gives up all other rights when
//! it starts ([`confinement`](crate::confinement)). Each volume is one [`session`](crate::session);
//! the control thread locks a projection's tree only for short times.
//!
//! Either process may die. The supervisor has the server's state as descriptors and as shared memory ([`region`](crate::region)),
//! so another server can continue. The server can send the state to another supervisor.
//!
//! | module | owns |
//! |---|---|
//! | [`process`] | the server's main loop |
//! | `volumes` | the server's volumes |
//! | [`fd_keeper`] | the process that keeps the descriptors of a killed server, and starts the next one |

pub mod fd_keeper;
pub mod process;
mod volumes;

//! Receives bytes and descriptors from a Unix socket.
//!
//! nix's `recvmsg` does not return truncated control data, and so leaks the descriptors that did arrive. This
//! module takes ownership of every received descriptor.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;

/// Maximum number of descriptors that the kernel sends with one message (`SCM_MAX_FD`).
pub const MAX_DESCRIPTORS: usize = 253;

/// Bytes and descriptors that were received in one call.
#[derive(Debug)]
pub struct Chunk {
    /// Number of bytes. 0 at the end of the stream.
    pub bytes: usize,
    /// Descriptors that arrived with the bytes. They are close-on-exec.
    pub fds: Vec<OwnedFd>,
    /// True if the kernel dropped descriptors, because this process has reached its limit on open files.
    pub truncated: bool,
}

#[repr(C)]
union Control {
    _align: libc::cmsghdr,
    bytes: [u8; 1088],
}

/// Receives the available bytes and descriptors without blocking. Fails with `EAGAIN` if nothing is available.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<Chunk> {
    let mut control = MaybeUninit::<Control>::zeroed();
    let mut vector = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: `msghdr` consists of integers and pointers, for which zero is a valid value.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut vector;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = size_of::<Control>() as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    let bytes = loop {
        // SAFETY: the header points to live buffers of the given lengths.
        let read = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut header, flags) };
        match Errno::result(read) {
            Ok(read) => break read.cast_unsigned(),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    };
    // SAFETY: the kernel has filled in the control data, and has stored its length in the header.
    let fds = unsafe { descriptors(&header) };
    Ok(Chunk { bytes, fds, truncated: header.msg_flags & libc::MSG_CTRUNC != 0 })
}

/// Takes ownership of the descriptors in the control data of a received message.
///
/// # Safety
/// `header` must have been filled in by a successful `recvmsg`. It may be passed to this function only once, because
/// the function takes ownership of the descriptors.
unsafe fn descriptors(header: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: by the contract above, the control data is valid for its length.
    let mut message = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !message.is_null() {
        // SAFETY: the iteration yields only complete headers within the control data.
        let (level, kind, length) =
            unsafe { ((*message).cmsg_level, (*message).cmsg_type, (*message).cmsg_len as usize) };
        if (level, kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: these macros only compute addresses from a valid header.
            let (data, start) = unsafe { (libc::CMSG_DATA(message), libc::CMSG_LEN(0) as usize) };
            for offset in (0..length.saturating_sub(start)).step_by(size_of::<RawFd>()) {
                // SAFETY: the offset is within the message's data. The kernel has just created the descriptor, and no
                // other code owns it.
                fds.push(unsafe {
                    OwnedFd::from_raw_fd(RawFd::from_ne_bytes(data.add(offset).cast::<[u8; 4]>().read()))
                });
            }
        }
        // SAFETY: `message` belongs to `header`.
        message = unsafe { libc::CMSG_NXTHDR(header, message) };
    }
    fds
}

//! Orders to the agent, such as to stop the job. Programs of the same user (`elasticctl`) send them over the agent's
//! Unix socket, the control socket. The agent's main loop takes them, and replies with lines of text.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;

use elasticrs_runtime::lock;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Maximum length of an order in bytes.
pub const MAX_ORDER: usize = 4096;

/// The process that has connected to the control socket, as the kernel tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    pub uid: u32,
    /// `None` if the kernel does not tell it, because the process is in another PID namespace.
    pub pid: Option<i32>,
}

/// An order to the agent. The agent's main loop gives the order's `number` with each reply.
#[derive(Debug, PartialEq, Eq)]
pub struct Order {
    pub number: u64,
    pub caller: Caller,
    pub text: String,
}

/// The orders to the agent that have not got their last reply yet, at most one for each connection to the socket.
#[derive(Debug, Default)]
pub(crate) struct Orders(Mutex<Open>);

#[derive(Debug, Default)]
struct Open {
    last: u64,
    waiting: VecDeque<Order>,
    replies: HashMap<u64, UnboundedSender<String>>,
}

/// Receives the lines with which the agent replies to one order. Dropping this value discards the order.
#[derive(Debug)]
pub(crate) struct Replies<'orders> {
    orders: &'orders Orders,
    number: u64,
    lines: UnboundedReceiver<String>,
}

impl Orders {
    /// Adds an order for the agent, and returns the value that receives the replies to it.
    pub(crate) fn put(&self, caller: Caller, text: String) -> Replies<'_> {
        let (reply, lines) = unbounded_channel();
        let mut open = lock(&self.0);
        open.last += 1;
        let number = open.last;
        open.waiting.push_back(Order { number, caller, text });
        open.replies.insert(number, reply);
        Replies { orders: self, number, lines }
    }

    /// Returns the orders that have arrived since the last call, the oldest first.
    pub(crate) fn take(&self) -> Vec<Order> {
        lock(&self.0).waiting.drain(..).collect()
    }

    /// Passes a line to the program that has sent the order `number`, unless that program has disconnected.
    pub(crate) fn reply(&self, number: u64, line: String, is_last: bool) {
        let mut open = lock(&self.0);
        if let Some(reply) = open.replies.get(&number) {
            // Ignore an error. It means that the connection has just ended.
            let _ = reply.send(line);
        }
        if is_last {
            open.replies.remove(&number);
        }
    }
}

impl Replies<'_> {
    /// Waits for the next line of the agent. `None` after the last one. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Option<String> {
        self.lines.recv().await
    }
}

impl Drop for Replies<'_> {
    fn drop(&mut self) {
        let mut open = lock(&self.orders.0);
        open.replies.remove(&self.number);
        open.waiting.retain(|order| order.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALLER: Caller = Caller { uid: 7, pid: Some(8) };

    #[test]
    fn an_order_is_taken_once_and_its_replies_end_with_the_last_one() {
        let orders = Orders::default();
        let mut replies = orders.put(CALLER, "stop".into());
        let taken = orders.take();
        assert_eq!(taken, [Order { number: 1, caller: CALLER, text: "stop".into() }]);
        assert!(orders.take().is_empty());
        orders.reply(1, "first".into(), false);
        orders.reply(1, "last".into(), true);
        orders.reply(1, "after the last".into(), true);
        assert_eq!(replies.lines.blocking_recv().as_deref(), Some("first"));
        assert_eq!(replies.lines.blocking_recv().as_deref(), Some("last"));
        assert_eq!(replies.lines.blocking_recv(), None);
    }

    #[test]
    fn an_order_of_a_program_that_has_gone_is_forgotten() {
        let orders = Orders::default();
        drop(orders.put(CALLER, "stop".into()));
        assert!(orders.take().is_empty());
        let taken = orders.put(CALLER, "stop".into());
        assert_eq!(orders.take().len(), 1);
        drop(taken);
        orders.reply(2, "nobody hears this".into(), true);
        assert!(lock(&orders.0).replies.is_empty());
    }
}

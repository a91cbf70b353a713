//! Lines for the user, not too many of them.

use std::time::{Duration, Instant};

/// So many lines in each [`WINDOW`]; the others are counted.
const LINES: u32 = 10;
const WINDOW: Duration = Duration::from_secs(10);

/// Passes lines on. A peer that misbehaves in a loop costs a few lines and a number.
pub(super) struct Notices {
    tell: Box<dyn Fn(String)>,
    since: Option<Instant>,
    told: u32,
    left_out: u64,
}

impl Notices {
    pub(super) fn new(tell: Box<dyn Fn(String)>) -> Self {
        Self { tell, since: None, told: 0, left_out: 0 }
    }

    pub(super) fn say(&mut self, line: String, now: Instant) {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= WINDOW) {
            self.since = Some(now);
            self.told = 0;
        }
        if self.told == LINES {
            self.left_out += 1;
            return;
        }
        self.told += 1;
        (self.tell)(match std::mem::take(&mut self.left_out) {
            0 => line,
            left_out => format!("{line} ({left_out} more of its kind were not told)"),
        });
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;

    #[test]
    fn a_flood_costs_a_few_lines_and_a_number() {
        let lines = Rc::new(RefCell::new(Vec::new()));
        let mut notices = {
            let lines = Rc::clone(&lines);
            Notices::new(Box::new(move |line| lines.borrow_mut().push(line)))
        };
        let start = Instant::now();
        for number in 0..100 {
            notices.say(format!("{number}"), start);
        }
        assert_eq!(lines.borrow().len(), 10);
        notices.say("later".into(), start + WINDOW);
        assert_eq!(lines.borrow().last().unwrap(), "later (90 more of its kind were not told)");
        notices.say("last".into(), start + WINDOW);
        assert_eq!(lines.borrow().last().unwrap(), "last");
    }
}

package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// A screen shows the story: lines of plain text, and on a terminal a last line that
// changes. It is for one goroutine.
type screen struct {
	w     io.Writer
	tty   bool
	pause time.Duration // between two looks at the engine
	start time.Time     // of the act
	next  time.Time     // when to show the engine again
	drawn bool          // the last line is one that changes
}

func newScreen(w io.Writer) *screen {
	s := &screen{w: w, pause: time.Second}
	if f, ok := w.(*os.File); ok && os.Getenv("TERM") != "dumb" {
		info, err := f.Stat()
		s.tty = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	if s.tty {
		s.pause = 50 * time.Millisecond
	}
	return s
}

// print shows a line.
func (s *screen) print(format string, a ...any) {
	s.clear()
	fmt.Fprintf(s.w, format+"\n", a...)
}

// act begins an act.
func (s *screen) act(title string) {
	s.print("\n%s", title)
	s.start = time.Now()
	s.next = s.start.Add(s.pause)
}

// say shows what happened to whom.
func (s *screen) say(at time.Time, who, format string, a ...any) {
	s.print("%5.2f s  %-8s %s", at.Sub(s.start).Seconds(), who, fmt.Sprintf(format, a...))
}

// more continues what was said.
func (s *screen) more(format string, a ...any) { s.print("%18s"+format, append([]any{""}, a...)...) }

// engine shows the engine's metrics, not more often than they can be read.
func (s *screen) engine(m sample, slots int) {
	switch {
	case m.at.Before(s.next):
	case !s.tty:
		s.sayEngine(m, slots)
	default:
		s.clear()
		fmt.Fprintf(s.w, "%5.2f s  engine   running [%s] %d/%d  KV [%s] %s  waiting %d", m.at.Sub(s.start).Seconds(),
			bar(float64(m.running)/float64(slots)), m.running, slots, bar(m.kv), percent(m.kv), m.waiting)
		s.drawn, s.next = true, m.at.Add(s.pause)
	}
}

// sayEngine shows the engine's metrics on a line that stays.
func (s *screen) sayEngine(m sample, slots int) {
	s.say(m.at, "engine", "%s", m.text(slots))
	s.next = m.at.Add(s.pause)
}

// clear removes the line that changes.
func (s *screen) clear() {
	if s.drawn {
		fmt.Fprint(s.w, "\r\x1b[K")
		s.drawn = false
	}
}

// text is what a reader needs of m.
func (m sample) text(slots int) string {
	return fmt.Sprintf("running %d/%d, waiting %d, KV cache %s", m.running, slots, m.waiting, percent(m.kv))
}

// table shows rows of as many cells, the first one aligned left and the others right.
func (s *screen) table(rows [][]string) {
	widths := make([]int, len(rows[0]))
	for _, r := range rows {
		for i, cell := range r {
			widths[i] = max(widths[i], len(cell))
		}
	}
	for _, r := range rows {
		line := fmt.Sprintf("  %-*s", widths[0], r[0])
		for i, cell := range r[1:] {
			line += fmt.Sprintf("   %*s", widths[i+1], cell)
		}
		s.print("%s", strings.TrimRight(line, " "))
	}
}

// bar draws a part of one.
func bar(part float64) string {
	const width = 10
	n := max(0, min(width, int(part*width+0.5)))
	return strings.Repeat("#", n) + strings.Repeat(".", width-n)
}

func percent(part float64) string { return fmt.Sprintf("%.0f%%", 100*part) }

// ms writes a duration in milliseconds, with a decimal where that says something.
func ms(d time.Duration) string {
	f := float64(d) / float64(time.Millisecond)
	if f < 10 {
		return fmt.Sprintf("%.1f ms", f)
	}
	return fmt.Sprintf("%.0f ms", f)
}

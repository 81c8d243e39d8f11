// Interceptor: eviction for a server that registers itself with grpc and takes only
// grpc.ServerOptions.
package main

import (
	"flag"
	"log"
	"net"
	"net/http"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/examples/internal/passthrough"
	"github.com/extevict/extevict/extproc"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:9002", "address to serve ext_proc on")
	admin := flag.String("admin", "127.0.0.1:9003", "address to take POST /abort?id=... on")
	flag.Parse()
	var registry abort.Registry
	go func() { log.Fatal(http.ListenAndServe(*admin, abortByID(&registry))) }()

	yours := newServer(grpc.ChainStreamInterceptor(extproc.StreamInterceptor(extproc.WithRegistry(&registry))))

	l, err := net.Listen("tcp", *listen)
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(yours.Serve(l))
}

// newServer stands for a library that makes its grpc.Server itself.
func newServer(opts ...grpc.ServerOption) *grpc.Server {
	s := grpc.NewServer(opts...)
	extprocpb.RegisterExternalProcessorServer(s, passthrough.Server{})
	return s
}

// abortByID ends every request that carries the id.
func abortByID(r *abort.Registry) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /abort", func(w http.ResponseWriter, req *http.Request) {
		if r.Abort(req.FormValue("id"), abort.Canceled) == 0 {
			http.Error(w, "no such request", http.StatusNotFound)
		}
	})
	return mux
}
